"""The index of a cache on disk: a bound, a tree, and the order of evictions."""

import random

from ckdist.engine.disk_index import DiskIndex


def store(index, *names, parent=""):
    """Stores a chain of entries, each with a letter as its name."""
    for name in names:
        slot = index.reserve(name.encode(), parent.encode())
        if slot is None:
            break
        index.confirm(name.encode(), slot)
        parent = name


def there(index, names):
    return "".join(name for name in names if name.encode() in index)


def test_leaves_go_first_and_the_oldest_of_them():
    index = DiskIndex(4)
    store(index, "a", "b")
    store(index, "x", "y")
    store(index, "n")
    assert there(index, "abxyn") == "axyn" and index.evicted == 1
    store(index, "m")
    assert there(index, "axynm") == "xynm"


def test_an_entry_that_was_used_again_outlives_those_used_once():
    index = DiskIndex(4)
    store(index, "a")
    index.touch([b"a"])
    for name in "bcdef":
        store(index, name)
    assert there(index, "abcdef") == "adef"
    for name in "ghijklm":
        store(index, name)
    assert there(index, "a") == "", "it is not kept for ever"


def test_a_chain_longer_than_the_cache_keeps_its_beginning():
    index = DiskIndex(3)
    store(index, *"abcdef")
    assert there(index, "abcdef") == "abc"


def test_an_entry_that_is_not_confirmed_is_neither_found_nor_evicted():
    index = DiskIndex(1)
    assert index.reserve(b"a", b"") == 0
    assert index.stored(b"a") is None and index.reserve(b"b", b"") is None
    index.confirm(b"a", 0)
    assert index.stored(b"a") is not None and index.reserve(b"b", b"") == 0


def test_a_dropped_entry_takes_its_descendants_with_it():
    index = DiskIndex(8)
    store(index, *"abc")
    store(index, "d", parent="a")
    store(index, "z")
    index.drop(b"b")
    assert there(index, "abcdz") == "adz"
    assert sorted(index.reserve(name, b"") for name in (b"p", b"q")) == [1, 2]


def test_a_restored_index_has_no_orphans_and_no_slot_twice():
    index = DiskIndex(6)
    entries = [(0, 5, 0, b"a", b"root"), (1, 6, 3, b"b", b"a"), (2, 7, 1, b"lost", b"gone"), (0, 9, 4, b"a", b"root")]
    index.restore(entries)
    assert there(index, ["a", "b", "lost"]) == "ab" and index.stored(b"a").slot == 4
    assert sorted(index.reserve(bytes([i]), b"") for i in range(4)) == [0, 1, 2, 5]


def test_at_random_the_tree_and_the_bound_hold():
    rng, index, parents = random.Random(0), DiskIndex(20), {}
    for i in range(3000):
        known = [name for name in parents if name in index]
        parent = rng.choice([b"", *known]) if known else b""
        name = str(i).encode()
        action = rng.random()
        if action < 0.7:
            parents[name] = parent
            slot = index.reserve(name, parent)
            if slot is not None and rng.random() < 0.9:
                index.confirm(name, slot)
            elif slot is not None:
                index.drop(name)
        elif known:
            (index.drop if action < 0.75 else lambda name: index.touch([name]))(rng.choice(known))
        names = [name for name in parents if name in index]
        slots = [index._entries[name].slot for name in names]
        assert len(slots) == len(set(slots)) <= 20 and all(0 <= slot < 20 for slot in slots)
        assert all(parents[name] == b"" or parents[name] in index for name in names)
