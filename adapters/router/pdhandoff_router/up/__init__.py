"""`pdhandoff up`: a whole topology in processes of this machine, to try it out and to test it."""
