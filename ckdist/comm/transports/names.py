"""The names of the transports between hosts, and of the ways to protect their traffic."""

ORDER = ("verbs", "mpi", "tcp")  # the order in which they are tried
CHOICES = ("auto", *ORDER)  # values of --transport
ENCRYPT = ("auto", "always", "never")  # values of --encrypt
