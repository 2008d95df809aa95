from dsv4lab.cli import main

main()
