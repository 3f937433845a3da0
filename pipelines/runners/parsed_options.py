"""Beam's options, parsed once for each class of them: Beam asks for them at every transform, and parses them anew."""

from typing import Any, TypeVar

from apache_beam.options.pipeline_options import PipelineOptions

_VIEWS = "_views"
T = TypeVar("T", bound=PipelineOptions)


class ParsedOptions(PipelineOptions):
    """Options whose views are kept. All views share what is set, so that one of each class is enough."""

    def view_as(self, cls: type[T]) -> T:
        views: dict[type, Any] = self.__dict__.setdefault(_VIEWS, {})
        if cls not in views:
            views[cls] = super().view_as(cls)
        view: T = views[cls]
        return view

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied, and sent to workers: no views, which are made again."""
        return {name: value for name, value in super().__getstate__().items() if name != _VIEWS}
