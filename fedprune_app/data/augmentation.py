"""Augmentation of training images."""

import torch
from torch import Tensor


class CropFlip:
    """Shift each image of a batch by -4 to 4 pixels along both axes, and mirror it with probability 1/2.

    It is built once from a client's normalised images (N, C, H, W), and keeps a padded copy of them on their device.
    ``black`` (C,) is the normalised value of a black pixel. Papers pad before they normalise, so the border is black,
    and not 0, which is the mean colour.

    :meth:`draws` maps positions (B,) to choices (B, 4) by 3 B draws from a CPU generator. A choice is the position of
    an image, the shifts down and to the right, and whether the image is mirrored. Calling it with choices, on the
    images' device, returns images (B, C, H, W), channels last in memory. A seed gives the same images on every device.
    """

    PADDING = 4

    def __init__(self, images: Tensor, black: Tensor) -> None:
        count, channels, self._height, self._width = images.shape
        border = self.PADDING
        self._rows, self._columns = self._height + 2 * border, self._width + 2 * border
        padded = black.to(images).expand(count, self._rows, self._columns, channels).contiguous()
        padded[:, border:-border, border:-border] = images.permute(0, 2, 3, 1)
        self._pixels = padded.view(-1, channels)  # of all images, row by row

    def draws(self, positions: Tensor, rng: torch.Generator) -> Tensor:
        count = len(positions)
        down, right = torch.randint(0, 2 * self.PADDING + 1, (2, count), generator=rng)
        mirrored = torch.randint(0, 2, (count,), generator=rng)
        return torch.stack([positions, down, right, mirrored], dim=1)

    def __call__(self, choices: Tensor) -> Tensor:
        count, device = len(choices), self._pixels.device
        position, down, right, mirrored = torch.split(choices, 1, dim=1)
        y = down + torch.arange(self._height, device=device)  # (B, H) in the padded image
        x = torch.arange(self._width, device=device)
        x = right + torch.where(mirrored.bool(), x.flip(0), x)  # (B, W)
        row = position * self._rows + y  # (B, H) among the rows of all images
        pixel = row.unsqueeze(2) * self._columns + x.unsqueeze(1)  # (B, H, W)
        # Selecting whole pixels at once is three times as fast as indexing by image, row and column.
        batch = self._pixels.index_select(0, pixel.flatten())
        return batch.view(count, self._height, self._width, -1).permute(0, 3, 1, 2)
