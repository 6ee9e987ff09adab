"""Wake-ups: hints that something may be there. Losing every one costs a poll interval."""
