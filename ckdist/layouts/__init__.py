"""What every start decides: layouts, stages, placement of experts, prefill, and whether the memory suffices."""
