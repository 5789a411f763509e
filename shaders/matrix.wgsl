// First line of every shader that multiplies on matrix units.
enable f16;
enable wgpu_cooperative_matrix;
