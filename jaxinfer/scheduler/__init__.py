"""Host-side scheduling: which tokens of which sequence are computed next, and in which pages.

Pure Python arithmetic: knows no array, no text and no device.
"""
