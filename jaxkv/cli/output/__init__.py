"""How results are shown: tables, plots and the drawing of the radix tree."""
