"""Figures and pages of the positional part of attention, from arrays and biases, never from models."""

from lengthwise.views.maps import QUANTITIES, LayerMap, Profile, Quantity
from lengthwise.views.position_maps import PositionMaps, load_maps
from lengthwise.views.tiles import Tiles

__all__ = ["QUANTITIES", "LayerMap", "PositionMaps", "Profile", "Quantity", "Tiles", "load_maps"]
