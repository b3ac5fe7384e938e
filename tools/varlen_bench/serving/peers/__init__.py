"""What people serve today, one python-backend model a file; the bench copies it into a model repository as model.py.

Nothing here is imported but by the server.
"""
