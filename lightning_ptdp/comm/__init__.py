"""Process groups, collectives and point-to-point messages. Nothing outside this folder calls a collective."""
