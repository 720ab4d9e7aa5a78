//! How calls are cut into chunks, segments and broadcast dimensions.

use march_engine::ops::anchor_read::{ReadPlan, Segment, Visible};
use march_engine::ops::elementwise::broadcast::{Dim, broadcast, check_broadcasts_to, dims};
use march_engine::ops::{gated_delta, log_linear};

#[test]
fn chunks_end_on_the_grid_and_at_boundaries() {
    let cut = |tokens, boundaries: &[usize]| -> Vec<(usize, usize, Option<usize>)> {
        gated_delta::chunks(tokens, boundaries, 0).iter().map(|c| (c.start, c.len, c.boundary)).collect()
    };
    assert_eq!(cut(0, &[]), []);
    assert_eq!(cut(33, &[]), [(0, 16, None), (16, 16, None), (32, 1, None)]);
    assert_eq!(cut(20, &[16, 20]), [(0, 16, Some(0)), (16, 4, Some(1))]);
    assert_eq!(cut(20, &[3, 18]), [(0, 3, Some(0)), (3, 13, None), (16, 2, Some(1)), (18, 2, None)]);
    let offset: Vec<_> = gated_delta::chunks(20, &[], 21).iter().map(|c| (c.start, c.len)).collect();
    assert_eq!(offset, [(0, 11), (11, 9)]);
}

#[test]
fn chunks_lie_on_the_absolute_grid() {
    let cut = |position, tokens| -> Vec<(usize, usize, Option<usize>)> {
        log_linear::chunks(position, tokens).iter().map(|c| (c.start, c.len, c.target())).collect()
    };
    assert_eq!(cut(0, 0), []);
    assert_eq!(cut(0, 33), [(0, 16, Some(5)), (16, 16, Some(6)), (32, 1, None)]);
    assert_eq!(cut(13, 20), [(0, 3, Some(5)), (3, 16, Some(6)), (19, 1, None)]);
}

#[test]
fn levels_of_a_position() {
    assert_eq!(log_linear::filled(0).count(), 0);
    assert_eq!(log_linear::filled(0b10110).collect::<Vec<_>>(), [2, 3, 5]);
    // Position 22 = 0b10110: level 2 is tokens 20..22, level 3 is 16..20; token 25 sees both at level 4.
    let chunk = log_linear::Chunk { start: 0, len: 10, position: 22 };
    assert_eq!([chunk.seen(2, 0), chunk.seen(3, 1), chunk.seen(2, 3), chunk.seen(3, 3)], [2, 3, 4, 4]);
}

#[test]
fn boundaries_become_segments() {
    let plan = ReadPlan::from_boundaries(10, &[vec![4, 8], vec![], vec![10]]);
    let want = [(4, 4, 0..1), (8, 2, 0..2)].map(|(start, len, run)| Segment {
        start,
        len,
        visible: Visible::Run(run),
    });
    assert_eq!(plan.segments, want);
    let plan = ReadPlan::from_boundaries(10, &[vec![4, 8], vec![5]]);
    assert_eq!(plan.groups(3), [vec![0, 1], vec![2]]);
    assert!(plan.check("read", 20, 3).is_ok());
    assert!(plan.check("read", 19, 3).is_err());
    assert!(plan.check("read", 20, 2).is_err());
}

#[test]
fn neighbours_merge() {
    let dim = |size, a, b| Dim { size, a, b };
    assert_eq!(dims(&[2, 3, 4], &[2, 3, 4], &[2, 3, 4]), [dim(24, 1, 1)]);
    assert_eq!(dims(&[2, 3, 4], &[2, 3, 4], &[4]), [dim(6, 4, 0), dim(4, 1, 1)]);
    assert_eq!(dims(&[2, 3, 4], &[2, 1, 4], &[3, 1]), [dim(2, 4, 0), dim(3, 0, 1), dim(4, 1, 0)]);
    assert_eq!(dims(&[], &[], &[1]), [dim(1, 1, 1)]);
    assert_eq!(dims(&[2, 3], &[2, 3], &[]), [dim(6, 1, 0)]);
}

#[test]
fn shapes_meet() {
    assert_eq!(broadcast("test", &[2, 1, 4], &[3, 1]).unwrap(), [2, 3, 4]);
    assert_eq!(broadcast("test", &[0, 1], &[1, 3]).unwrap(), [0, 3]);
    assert!(broadcast("test", &[2, 3], &[2]).is_err());
    assert!(broadcast("test", &[0], &[2]).is_err());
    assert!(check_broadcasts_to("test", &[3, 1], &[2, 3, 4]).is_ok());
    assert!(check_broadcasts_to("test", &[2, 3, 4], &[3, 1]).is_err());
}
