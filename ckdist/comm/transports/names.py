"""The names of the transports between hosts."""

ORDER = ("verbs", "mpi", "tcp")  # the order in which they are tried
CHOICES = ("auto", *ORDER)  # values of --transport
