//! The device's sampler against the specification.

use super::*;
use crate::testing::{assert_close, downloaded, gpu, random, upload, values};

#[test]
fn a_soft_cap_bounds_every_value() {
    let gpu = gpu();
    for n in [0, 1, 3, 4, 989, 5000] {
        let x: Vec<f32> = values(&random(&[n], 3)).iter().map(|x| x * 100.0).collect();
        let buffer = upload(&gpu, Kind::F32, &x);
        soft_cap(&*gpu, buffer.view(), 30.0).unwrap();
        let want: Vec<f32> = x.iter().map(|x| 30.0 * (x / 30.0).tanh()).collect();
        assert_close(&downloaded(&buffer), &want, 1e-6, &format!("{n} values"));
    }
}
