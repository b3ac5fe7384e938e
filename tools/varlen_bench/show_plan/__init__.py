"""Pictures of memory plans: offsets across and ops down, like figure 3 of the paper.

`maps` says where every usage lies and when; `picture` draws it, and adds every figure in tables on a page.
"""
