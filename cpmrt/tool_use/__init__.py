"""Calls of tools: the formats in which models write them, what reads them, and the grammars that they obey."""
