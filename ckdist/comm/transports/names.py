"""The transports between hosts, by their names."""

ORDER = ("verbs", "mpi", "tcp")  # in which they are tried
CHOICES = ("auto", *ORDER)  # of `--transport`
