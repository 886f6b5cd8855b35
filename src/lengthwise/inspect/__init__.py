"""What a model does with positions: maps of every head, of our models and of anybody's."""

from lengthwise.inspect.look import position_maps, position_views
from lengthwise.views import PositionMaps, load_maps

__all__ = ["PositionMaps", "load_maps", "position_maps", "position_views"]
