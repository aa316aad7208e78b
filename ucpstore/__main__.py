"""`python -m ucpstore`: the command line."""

from ucpstore.cli import main

main()
