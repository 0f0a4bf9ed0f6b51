"""The layers of one rank under context parallelism. Every layer takes this rank's rows and the step's context."""
