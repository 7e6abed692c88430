"""Owns the search for cycles of imports; imports inside functions and for type checking count as well.

Must not import the packages that it reads.
"""

from __future__ import annotations

import graphlib

import grimp


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """The nodes of a cycle, the first one repeated at the end; empty if there is none."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def import_cycles(*packages: str) -> list[list[str]]:
    """A cycle between the modules of these packages, and one between the children of each package, if any."""
    graph = grimp.build_graph(*packages, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphs = [imports, *(edges for package in imports if (edges := sibling_edges(package, imports)))]
    return [found for edges in graphs if (found := cycle(edges))]


def sibling_edges(package: str, imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports between the children of a package, through any module inside them."""
    depth = package.count(".") + 2

    def child(module: str) -> str | None:
        return ".".join(module.split(".")[:depth]) if module.startswith(f"{package}.") else None

    edges: dict[str, set[str]] = {}
    for module, imported in imports.items():
        if importer := child(module):
            edges.setdefault(importer, set()).update(other for name in imported if (other := child(name)))
            edges[importer].discard(importer)
    return edges
