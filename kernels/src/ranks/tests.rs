//! The CPU, which is the only rank, against the reference, and the errors of wrong calls.

use super::*;
use crate::operand::Operand;
use crate::testing::{compute, poisoned, random, values};

#[test]
fn the_cpu_has_the_whole_already() {
    let (x, parts) = (random(&[7], 1), poisoned(&[7]));
    let before = values(&x);
    compute().all_reduce(&AllReduceArgs { x: (&x).into(), parts: (&parts).into() }).unwrap();
    assert_eq!(values(&x), reference::all_reduce(&[before]));
    let (part, out) = (random(&[3, 5], 2), poisoned(&[3, 5]));
    let args = GatherColumnsArgs {
        part: (&part).into(),
        columns: 5,
        parts: (&parts).into(),
        out: (&out).into(),
    };
    compute().gather_columns(&args).unwrap();
    assert_eq!(values(&out), reference::gather_columns(&[values(&part)], 3, 5));
}

#[test]
fn wrong_shapes_are_refused() {
    let [a, b, c] = [1, 2, 3].map(|seed| random(&[12], seed));
    let [a, b, c] = [&a, &b, &c].map(crate::operand::TensorView::from);
    let reduce = |x, parts| compute().all_reduce(&AllReduceArgs { x, parts }).is_err();
    assert!(!reduce(a, b));
    assert!(reduce(a, b.slice(0..11)), "too little memory");
    assert!(reduce(a, a), "shared memory");
    let gather = |part, columns, parts, out| {
        let args = GatherColumnsArgs { part, columns, parts, out };
        compute().gather_columns(&args).is_err()
    };
    assert!(!gather(a, 4, b.slice(0..4), c));
    assert!(gather(a, 4, b.slice(0..3), c), "no room for a row");
    assert!(gather(a, 5, b, c), "rows that are not whole");
    assert!(gather(a.slice(0..8), 4, b, c), "too few rows");
    assert!(gather(a, 0, b, c), "no columns");
    assert!(gather(a, 4, b, b), "shared memory");
}
