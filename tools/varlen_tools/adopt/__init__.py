"""`varlen adopt`: the varlen model of an existing model, compared with it."""
