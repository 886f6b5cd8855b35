"""What models do with positions: capture attention, and summarise it as maps of every head, ours and others'."""

from lengthwise.inspect.capture import capture_attention
from lengthwise.inspect.model_maps import position_maps, position_views
from lengthwise.views import PositionMaps, load_maps

__all__ = ["PositionMaps", "capture_attention", "load_maps", "position_maps", "position_views"]
