"""Converts pictures. Here: only its options."""

import argparse
import json


def options(arguments=None):
    parser = argparse.ArgumentParser(prog="convert")
    parser.add_argument("source")
    parser.add_argument("--cache", type=bool, default=True, help="yes or no")
    parser.add_argument("-v", "--verbose", action="store_const", const=1, default=0)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--tag", default=[], help="may be given more than once")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    print(json.dumps(vars(options())))
