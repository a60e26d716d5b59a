"""The draft models of speculation: what they need of memory, and their passes."""
