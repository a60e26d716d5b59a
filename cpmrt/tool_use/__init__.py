"""Tool calls: the formats in which models write them, their parsers, and the grammars that constrain them."""
