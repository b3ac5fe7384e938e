"""Pictures of plans: the space-time map of each chunk, offsets across and ops down, as figure 3 of the paper has it.

`maps` says what lies where and when, `picture` draws it as SVG, `page` puts it on a page that explains itself.
"""
