"""Where the work lies: items, spans, tables of packed rows, splits, and what a forward leaves for a backward."""
