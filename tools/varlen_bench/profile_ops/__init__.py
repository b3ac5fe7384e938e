"""Where the time of a model goes, by op and by class of ops."""
