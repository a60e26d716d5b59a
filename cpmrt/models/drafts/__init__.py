"""The draft models of speculation: their weights and buffers, and their passes."""
