"""The benchmark of `varlen adopt`: a stock ensemble beside its varlen model."""
