"""Line charts as SVG and PNG, without a display or a plotting library: `chart` is data, `svg` and `png` draw."""
