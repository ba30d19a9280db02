"""Doctor: what this installation and this machine offer, what is wrong, and the line that mends it.

``python -m collectives.doctor`` prints a report that can be pasted into an issue. The modules of this
package import nothing else of collectives when they are imported, so that the report is made where
the package itself can't be: ``python .../collectives/doctor/__main__.py``.
"""

from .findings import Finding, Section

__all__ = ["Finding", "Section"]
