"""`flashgrpo bench`: strategies against each other on the tiny Wan, over seeds.

Command line only: it starts the runs as processes of their own.
"""
