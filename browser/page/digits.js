// From a drawing to the image that a model of MNIST reads. Pure functions on arrays.

/**
 * Grey values 0 to 255 (side x side) of a drawing (grey: width x height, 0 to 255, ink is bright); null without ink.
 *
 * As MNIST was made: the bounding box of the ink is scaled, keeping its ratio, so that its longer side has 20 of 28
 * pixels; each pixel is the mean of the ink in it; the centre of mass goes to pixel (14, 14), to the nearest whole one.
 * A test image of MNIST that is drawn pixel by pixel comes back as it was.
 * Images of 8 x 8 (scikit-learn's digits) have no margin: there the longer side has all 8 pixels, centred by its box.
 * Source: http://yann.lecun.com/exdb/mnist
 */
export function centred(grey, width, height, side) {
  const box = boundingBox(grey, width, height);
  if (!box) return null;
  const longest = side === 8 ? 8 : Math.round((side * 20) / 28), scale = longest / Math.max(box.width, box.height);
  const columns = Math.max(1, Math.round(box.width * scale)), rows = Math.max(1, Math.round(box.height * scale));
  const small = new Float64Array(rows * columns);
  let mass = 0, massX = 0, massY = 0;
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const left = box.left + (column * box.width) / columns, right = box.left + ((column + 1) * box.width) / columns;
      const top = box.top + (row * box.height) / rows, bottom = box.top + ((row + 1) * box.height) / rows;
      const value = meanOf(grey, width, left, right, top, bottom);
      small[row * columns + column] = value;
      mass += value;
      massX += value * column;
      massY += value * row;
    }
  }
  const fits = longest < side;
  const place = (centre, size) => Math.min(side - size, Math.max(0, Math.round(side / 2 - centre)));
  const shiftX = place(fits ? massX / mass : columns / 2, columns), shiftY = place(fits ? massY / mass : rows / 2, rows);
  const image = new Uint8Array(side * side);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      image[(row + shiftY) * side + column + shiftX] = Math.round(small[row * columns + column]);
    }
  }
  return image;
}

function boundingBox(grey, width, height) {
  let left = width, right = -1, top = height, bottom = -1;
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      if (!grey[y * width + x]) continue;
      left = Math.min(left, x);
      right = Math.max(right, x);
      top = Math.min(top, y);
      bottom = y;
    }
  }
  return right < 0 ? null : { left, top, width: right - left + 1, height: bottom - top + 1 };
}

/** The mean of a rectangle whose sides may lie within pixels. */
function meanOf(grey, width, left, right, top, bottom) {
  let sum = 0, area = 0;
  for (let y = Math.floor(top); y < Math.ceil(bottom - 1e-9); y++) {
    const high = Math.min(y + 1, bottom) - Math.max(y, top);
    for (let x = Math.floor(left); x < Math.ceil(right - 1e-9); x++) {
      const part = high * (Math.min(x + 1, right) - Math.max(x, left));
      sum += part * grey[y * width + x];
      area += part;
    }
  }
  return sum / area;
}
