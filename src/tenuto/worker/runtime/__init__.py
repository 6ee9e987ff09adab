"""How an attempt is run. A runtime turns claimed work into an output or an exception."""
