"""Code that Inductor wrote: whole programs compiled by it, read as text, and run as operators of a schedule."""
