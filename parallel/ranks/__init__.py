"""Run functions on ranks: in a pool of processes, in the processes of a launcher, or on one rank of a fake world."""
