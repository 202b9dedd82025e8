"""``autopar train``: what is trained, the loop that every rank runs, and what it reports."""
