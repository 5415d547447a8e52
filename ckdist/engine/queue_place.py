"""The place of a request in the queues of rank 0."""

from ckdist.engine.typed_records import Record

NO_CLIENT = ""  # of all requests that name none


class QueuePlace(Record, frozen=True):
    """The queue in which a request waits, and its order there."""

    client: str = NO_CLIENT  # an API key's name, or an address; clients take turns
    batch: bool = False  # the request runs only in room that interactive ones leave
    priority: int = 0  # among a client's requests of one class, a lower number runs earlier


ANY_PLACE = QueuePlace()
