// Index of a workgroup in a one-dimensional list that may be longer than one dimension of a dispatch allows:
// `Gpu::list` folds it into x and y.
fn group_index(workgroup: vec3<u32>, groups: vec3<u32>) -> u32 {
    return workgroup.x + workgroup.y * groups.x;
}
