"""Loss normalisation under context parallelism: what the notebooks and the tests share."""
