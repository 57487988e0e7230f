"""Results as people see them: a strip of a prompt and bars of time, in a notebook, a browser or a terminal.

Knows reports and how tokens read as text; knows nothing of engines, models or frameworks.
"""
