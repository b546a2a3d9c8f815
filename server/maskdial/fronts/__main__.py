"""The command of a front end."""

from maskdial.fronts.front import main

main()
