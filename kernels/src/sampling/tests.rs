//! Each pass against its specification over awkward sizes, and the same bits on every instruction
//! set.

use super::*;
use crate::testing::{random, values};
use std::hint::black_box;

/// Rows of awkward lengths with values from -`spread` to 0, 0 included.
fn rows(spread: f32) -> impl Iterator<Item = Vec<f32>> {
    [1, 3, 15, 16, 17, 63, 64, 65, 989, 49_152].into_iter().map(move |length: usize| {
        let mut row = values(&random(&[length], length as u64));
        for x in &mut row {
            *x = (*x - 1.0) * spread / 2.0;
        }
        row[length / 2] = 0.0;
        row
    })
}

#[test]
fn the_largest_and_the_first_of_equals_are_found() {
    for mut row in rows(30.0) {
        let length = row.len();
        assert_eq!(scan(&row), Scan { max: 0.0, finite: true });
        row.push(0.0);
        assert_eq!(first_equal(&row, 0.0), Some(length / 2));
        assert_eq!(first_equal(&row, 7.0), None);
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, length / 3, length] {
                let mut row = row.clone();
                row[at] = wrong;
                assert!(!scan(&row).finite, "{wrong} at {at} of {length}");
            }
        }
        row[0] = f32::NEG_INFINITY;
        assert_eq!(scan(&row).max, 0.0);
    }
    assert_eq!(scan(&[]), Scan { max: f32::NEG_INFINITY, finite: true });
}

#[test]
fn sums_are_those_of_the_specification() {
    for spread in [0.1, 5.0, 40.0, 500.0] {
        for row in rows(spread) {
            let (found, want) = (mass(&row), reference::mass(&row));
            assert!((found - want).abs() < 3e-7 * want, "{found} for {want}, {} values", row.len());
        }
    }
    assert_eq!(mass(&[f32::NEG_INFINITY, 0.0, -1e30]), 1.0);
}

#[test]
fn thresholds_keep_positions_in_order() {
    for row in rows(10.0) {
        for threshold in [-11.0, -5.0, -0.01, 0.0, 1.0] {
            let mut found = Vec::new();
            above(&row, threshold, &mut found);
            let want: Vec<u32> =
                (0..).zip(&row).filter(|(_, x)| **x >= threshold).map(|(i, _)| i).collect();
            assert_eq!(found, want, "{threshold} over {}", row.len());
        }
    }
}

#[test]
fn scaling_is_one_subtraction_and_one_division() {
    for row in rows(9.0) {
        let mut out = vec![f32::NAN; 3];
        scale(&row, 1.5, 0.7, &mut out);
        let want: Vec<u32> = row.iter().map(|x| ((x - 1.5) / 0.7).to_bits()).collect();
        assert_eq!(out.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), want);
    }
}

#[test]
fn gumbel_max_is_that_of_computing_every_noise() {
    for spread in [0.0, 1.0, 12.0, 60.0] {
        for (seed, mut row) in (0..).zip(rows(spread)) {
            let seed = seed << 31 | seed;
            assert_eq!(
                gumbel_argmax(&row, seed, 9),
                reference::gumbel_argmax(&row, seed, 9),
                "{} values",
                row.len()
            );
            row[0] = f32::NEG_INFINITY;
            assert_eq!(gumbel_argmax(&row, seed, 10), reference::gumbel_argmax(&row, seed, 10));
        }
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    for row in rows(20.0) {
        let on = |isa| {
            let (found, sum, mut ids) = (scan_row(isa, &row), mass_of_row(isa, &row), Vec::new());
            above_in_row(isa, &row, -9.0, &mut ids);
            (found.max.to_bits(), found.finite, f64::to_bits(sum), ids)
        };
        let portable = on(Isa::Portable);
        assert!(Isa::available().all(|isa| on(isa) == portable));
    }
}

/// Prints microseconds for each pass; the figures in the head come from here.
#[test]
#[ignore = "measures"]
fn passes_at_a_common_vocabulary() {
    let row = rows(20.0).last().unwrap();
    let measure = |name: &str, pass: &mut dyn FnMut()| {
        let mut times: Vec<f64> = (0..201)
            .map(|_| {
                let began = std::time::Instant::now();
                pass();
                began.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!("{name}: {:.1} µs (fastest {:.1})", times[100], times[0]);
    };
    let (mut out, mut ids) = (Vec::new(), Vec::new());
    for isa in Isa::available() {
        println!("{isa:?}");
        measure("scan", &mut || {
            black_box(scan_row(isa, &row));
        });
        measure("first_equal", &mut || {
            black_box(first_in_row(isa, &row, 1.0));
        });
        measure("mass", &mut || {
            black_box(mass_of_row(isa, &row));
        });
        measure("above", &mut || {
            ids.clear();
            above_in_row(isa, &row, -1.0, &mut ids);
        });
    }
    measure("scale", &mut || scale(&row, 0.0, 0.8, &mut out));
    measure("gumbel_argmax", &mut || assert!(gumbel_argmax(&row, 5, 5).is_some()));
    let flat = vec![0.0; row.len()];
    measure("gumbel_argmax of equals", &mut || assert!(gumbel_argmax(&flat, 5, 5).is_some()));
}
