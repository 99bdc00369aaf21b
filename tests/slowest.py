"""Where the tests' time goes, by file, from a JUnit report: `make test-times` prints it."""

import sys
from collections import Counter, defaultdict
from xml.etree import ElementTree

SHOWN = 12


def main(report: str) -> None:
    seconds: dict[str, float] = defaultdict(float)
    tests: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].removeprefix("tests.").replace(".", "/")
        seconds[file] += float(case.attrib["time"])
        tests[file] += 1
    print("| file | seconds | tests |\n|---|---|---|")
    for file, time in sorted(seconds.items(), key=lambda each: -each[1])[:SHOWN]:
        print(f"| {file} | {time:.0f} | {tests[file]} |")
    print(f"| all {len(seconds)} | {sum(seconds.values()):.0f} | {tests.total()} |")


if __name__ == "__main__":
    main(sys.argv[1])
