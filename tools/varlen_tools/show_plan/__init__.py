"""Pictures of plans: the space-time map of each chunk, offsets across and ops down, as figure 3 of the paper has it.

`maps` says where every usage lies and when, `picture` draws it, `page` adds every figure in tables.
"""
