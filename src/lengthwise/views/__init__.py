"""Figures and pages of the positional part of attention, from arrays and biases, never from models."""

from lengthwise.views.maps import WHATS, LayerMap, Profile, What
from lengthwise.views.position_maps import PositionMaps, load_maps
from lengthwise.views.tiles import Tiles

__all__ = ["WHATS", "LayerMap", "PositionMaps", "Profile", "Tiles", "What", "load_maps"]
