//! Gathered rows are the table's, whether ids come from the host or from the previous step.

use super::*;
use crate::embedding::reference;
use crate::gpu::{Buffer, Emulator};
use crate::linear::packed_types;
use crate::operand::{ColumnsBuffer, MatrixBuffer, OpMemory};
use crate::testing::{
    KINDS, Packed, assert_close, downloaded, gpu, poisoned_buffer, random, rounded, upload, values,
};
use std::sync::Arc;

const HOST: u32 = u32::MAX;

/// A table in the packed form of each sort: the last row, columns that fill no tile, and columns in
/// another order.
#[test]
fn rows_of_a_packed_table_are_dequantised() {
    let gpu = gpu();
    for dtype in packed_types() {
        let widths = [32usize, 96, 544, 256, 768].into_iter();
        for width in widths.filter(|width| width.is_multiple_of(dtype.block_size())) {
            let table = Packed::new(dtype, 45, width);
            let order: Vec<u32> = (0..width as u32).rev().collect();
            check_rows(&gpu, &table, &table.values, None);
            let reversed = table.values.chunks(width).flat_map(|row| row.iter().rev().copied());
            check_rows(&gpu, &table, &reversed.collect::<Vec<_>>(), Some(&order));
        }
    }
}

/// Gathers rows of a table with these values.
fn check_rows(gpu: &DeviceOps, table: &Packed, want: &[f32], order: Option<&[u32]>) {
    let Packed { format, ref bytes, cols, .. } = *table;
    let values = Buffer::from_slice(gpu, bytes).unwrap();
    let parts = vec![MatrixPart { values, rows: 45, format: Some(format) }];
    let order = order.map(|order| ColumnsBuffer {
        inputs: Buffer::from_slice(gpu, order).unwrap(),
        gathered: Arc::new(poisoned_buffer(gpu, Kind::Bf16, cols)),
    });
    let matrix = MatrixBuffer { parts, cols, scratch: None, order, rounded: None };
    let ids = [44u32, 0, 31, 32, 7];
    let host = Buffer::from_slice(gpu, &ids).unwrap();
    for scale in [1.0, 3.5] {
        let want = rounded(Kind::Bf16, &reference::gather(want, cols, &ids, scale));
        let gather = |kind| {
            let out = poisoned_buffer(gpu, kind, 5 * cols);
            let table = DeviceOps::matrix(&matrix);
            let (ids, device) = (host.view(), None);
            let args = GatherArgs { table, ids, device, scale, out: out.view() };
            gpu.gather(&args).map(|()| downloaded(&out))
        };
        // Scales of a folder's floats have eleven bits on a device.
        let got = gather(Kind::Bf16).unwrap();
        let tolerance = if format.is_float() { 1e-2 } else { 0.0 };
        assert_close(&got, &want, tolerance, &format!("{format:?} × {scale}"));
        assert!(gather(Kind::F32).is_err(), "{format:?} to f32");
    }
}

#[test]
fn rows_are_those_of_the_table() {
    let gpu = gpu();
    let ids = [4u32, 0, 12, 4, 7];
    let many: Vec<u32> = (0..300).map(|i| i * 7 % 13).collect();
    for width in [1, 19, 64, 989, 4096] {
        for (kind, tolerance) in KINDS {
            for (ids, scale) in [(&ids[..], 1.0), (&ids[..2], 64.5), (&many, 1.0), (&[], 1.0)] {
                let table = rounded(kind, &values(&random(&[13, width], 5)));
                let device_table = upload(&gpu, kind, &table);
                // Every other id is known to the device alone; the host's number in its place is no
                // valid id.
                let previous =
                    Buffer::from_slice(&gpu, &ids.iter().rev().copied().collect::<Vec<_>>())
                        .unwrap();
                let fed_back = |i: usize| i % 2 == 1;
                let host: Vec<u32> = ids
                    .iter()
                    .enumerate()
                    .map(|(i, id)| if fed_back(i) { 99 } else { *id })
                    .collect();
                let back = |i: usize| if fed_back(i) { (ids.len() - 1 - i) as u32 } else { HOST };
                let feedback: Vec<u32> = (0..ids.len()).map(back).collect();
                let [host, feedback, ids_alone] =
                    [&host, &feedback, ids].map(|words| Buffer::from_slice(&gpu, words).unwrap());
                let [out, plain] = [0, 1].map(|_| poisoned_buffer(&gpu, kind, ids.len() * width));
                let slots: Vec<u32> = (0..ids.len() as u32).map(|i| i * 3 + 1).collect();
                let [slots, history] =
                    [slots, vec![99; 900]].map(|words| Buffer::from_slice(&gpu, &words).unwrap());
                let device = DeviceTokens {
                    feedback: feedback.view(),
                    previous: previous.view(),
                    slots: slots.view(),
                    history: history.view(),
                };
                let args = GatherArgs {
                    table: MatrixView::dense(device_table.view(), 13, width),
                    ids: host.view(),
                    device: Some(device),
                    scale,
                    out: out.view(),
                };
                gpu.gather(&args).unwrap();
                let what = format!("{kind:?} {}x{width}", ids.len());
                assert_close(
                    &downloaded(&out),
                    &reference::gather(&table, width, ids, scale),
                    tolerance,
                    &what,
                );
                let noted = |place: usize| {
                    (place % 3 == 1).then(|| ids.get(place / 3).copied()).flatten().unwrap_or(99)
                };
                assert_eq!(
                    history.to_vec::<u32>().unwrap(),
                    (0..900).map(noted).collect::<Vec<_>>(),
                    "{what}"
                );
                let (x, rows, out) = (device_table.view(), ids_alone.view(), plain.view());
                gpu.select_rows(&SelectRowsArgs { x, width, rows, out }).unwrap();
                assert_eq!(
                    downloaded(&plain),
                    reference::gather(&table, width, ids, 1.0),
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let check = |[ids, feedback, slot]: [u32; 3], previous: &[u32], width: usize, expect: &str| {
        // A fault ends a device for the whole process.
        let gpu = Emulator::new();
        let table = upload(&gpu, Kind::F32, &[0.0; 12]);
        let out = poisoned_buffer(&gpu, Kind::F32, 4);
        let [ids, feedback, slots] =
            [ids, feedback, slot].map(|word| Buffer::from_slice(&gpu, &[word]).unwrap());
        let previous = Buffer::from_slice(&gpu, previous).unwrap();
        let history = poisoned_buffer(&gpu, Kind::U32, 2);
        let [ids, feedback, previous, slots, history] =
            [&ids, &feedback, &previous, &slots, &history].map(Buffer::view);
        let (table, out) = (table.view(), out.view());
        let table = MatrixView::dense(table, 12 / width, width);
        let device = Some(DeviceTokens { feedback, previous, slots, history });
        let args = GatherArgs { table, ids, device, scale: 1.0, out };
        let error = gpu.gather(&args).and_then(|()| gpu.synchronise()).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    };
    check([3, HOST, 0], &[0], 4, "id < rows");
    check([0, 0, 0], &[3], 4, "id < rows");
    check([0, 1, 0], &[0], 4, "source < previous_len");
    check([0, HOST, 2], &[0], 4, "slot < history_len");
    check([0, HOST, 0], &[0], 5, "width of 5");
    let gpu = gpu();
    let table = upload(&gpu, Kind::F32, &[0.0; 12]);
    let (x, rows, out) = (table.view(), table.view(), table.view());
    assert!(gpu.select_rows(&SelectRowsArgs { x, width: 4, rows, out }).is_err());
}
