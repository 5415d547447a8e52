"""A valid file with a few of its bytes changed, which a reader must read or refuse."""

from hypothesis import strategies as st


def changes(size: int, most: int = 4, longest: int = 8) -> st.SearchStrategy[list[tuple[int, bytes]]]:
    """Up to `most` places, from 0 to `size`, and up to `longest` bytes that stand there instead."""
    return st.lists(st.tuples(st.integers(0, size), st.binary(min_size=1, max_size=longest)), min_size=1, max_size=most)


def mutated(valid: bytes, places: list[tuple[int, bytes]]) -> bytearray:
    """`valid` with those bytes, at places that wrap around; its end may grow by a few."""
    data = bytearray(valid)
    for at, new in places:
        begin = at % len(data)
        data[begin : begin + len(new)] = new
    return data
