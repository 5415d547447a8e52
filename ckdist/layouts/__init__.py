"""The decisions of every start: layouts, stages, placement of experts, prefill, and whether the memory suffices."""
