//! The operands of ops, in the machine's memory or on a device: ranges of values, of u32 numbers,
//! and matrices of weights. An op's arguments are written over these traits, and checked once for
//! the CPU and the device.

use crate::Result;
use crate::error::{ensure, shape};
use crate::gpu::{Buffer, Gpu, Kind, View};
use crate::linear::{DeviceFormat, Weight};
use crate::memory::prefer_large_pages;
use candle_core::{DType, Device, Tensor};
use half::f16;
use half::vec::HalfBitsVecExt;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// A contiguous range of values of one kind. It is plain data: the buffer behind it must outlive
/// the work that was given the range.
pub trait Operand: Copy + Debug {
    /// The u32 values that go with operands of this sort: token ids, positions, slots, row numbers.
    type Indices: Copy + Debug;
    /// The weight matrices `[rows (outputs), cols (inputs)]` that go with operands of this sort.
    type Matrix: Copy + Debug;

    /// The number of values.
    fn len(self) -> usize;

    fn is_empty(self) -> bool {
        self.len() == 0
    }

    fn kind(self) -> Kind;

    /// Some of the values.
    ///
    /// # Panics
    /// When `range` leaves the operand.
    #[must_use]
    fn slice(self, range: Range<usize>) -> Self;

    /// Whether writing one of the two may change or block the other.
    fn shares_memory(self, other: Self) -> bool;

    /// The number of indices; `None` if the values are not u32.
    fn count(indices: Self::Indices) -> Option<usize>;

    /// The rows and columns of a matrix.
    fn shape(matrix: Self::Matrix) -> (usize, usize);
}

/// The memory of the operands of a set of ops: the machine's or a device's.
pub trait OpMemory {
    /// Memory that is owned. It is allocated when a model is loaded, and never in a step.
    type Buffer: Send + Sync;
    /// A matrix of weights that is owned.
    type Matrix: Send + Sync;
    type View<'a>: Operand;

    /// A buffer of `len` values. Their content is unspecified.
    fn allocate(&self, kind: Kind, len: usize) -> Result<Self::Buffer>;
    /// A buffer of f32 values.
    fn upload(&self, values: &[f32]) -> Result<Self::Buffer>;
    /// All values of a buffer.
    fn view(buffer: &Self::Buffer) -> Self::View<'_>;
    fn matrix(matrix: &Self::Matrix) -> <Self::View<'_> as Operand>::Matrix;
    /// Whether any part of a matrix is block-quantised in memory.
    fn is_quantised(matrix: &Self::Matrix) -> bool;
    /// Whether products with a matrix round activations to eight bits that an op before may have
    /// rounded.
    fn takes_rounded(matrix: &Self::Matrix) -> bool;
}

/// The u32 values that an op of `M` reads.
pub type IndicesOf<'a, M> = <<M as OpMemory>::View<'a> as Operand>::Indices;

/// A range of a contiguous CPU tensor.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub(crate) tensor: &'a Tensor,
    start: usize,
    len: usize,
}

impl TensorView<'_> {
    /// The values' place among those of the tensor.
    pub(crate) fn range(self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

impl<'a> From<&'a Tensor> for TensorView<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self { tensor, start: 0, len: tensor.elem_count() }
    }
}

impl<'a> Operand for TensorView<'a> {
    type Indices = &'a [u32];
    type Matrix = &'a Weight;

    fn len(self) -> usize {
        self.len
    }

    fn kind(self) -> Kind {
        match self.tensor.dtype() {
            DType::F32 => Kind::F32,
            DType::F16 => Kind::F16,
            DType::BF16 => Kind::Bf16,
            DType::U32 => Kind::U32,
            // No op of the CPU takes any other type; bytes are refused like them.
            _ => Kind::U8,
        }
    }

    fn slice(self, range: Range<usize>) -> Self {
        let Range { start, end } = range;
        assert!(start <= end && end <= self.len, "{start}..{end} of {} values", self.len);
        Self { start: self.start + start, len: end - start, ..self }
    }

    /// This holds for all views of one tensor, because candle locks a tensor's storage as a whole.
    fn shares_memory(self, other: Self) -> bool {
        let address = |view: Self| std::ptr::from_ref(&*view.tensor.storage_and_layout().0);
        address(self) == address(other)
    }

    fn count(indices: &[u32]) -> Option<usize> {
        Some(indices.len())
    }

    fn shape(matrix: &Weight) -> (usize, usize) {
        (matrix.rows(), matrix.cols())
    }
}

impl OpMemory for crate::Compute {
    type Buffer = Tensor;
    type Matrix = Weight;
    type View<'a> = TensorView<'a>;

    /// Returns zeros that the system has promised but not yet given, in large pages once it does.
    fn allocate(&self, kind: Kind, len: usize) -> Result<Tensor> {
        let tensor = match kind {
            Kind::F32 => {
                let values = vec![0f32; len];
                prefer_large_pages(&values);
                Tensor::from_vec(values, len, &Device::Cpu)
            }
            Kind::F16 => {
                let bits = vec![0u16; len];
                prefer_large_pages(&bits);
                Tensor::from_vec(bits.reinterpret_into::<f16>(), len, &Device::Cpu)
            }
            Kind::U32 => Tensor::from_vec(vec![0u32; len], len, &Device::Cpu),
            _ => return Err(shape("allocate", format!("the CPU has no ops on {kind:?}"))),
        };
        Ok(tensor?)
    }

    fn upload(&self, values: &[f32]) -> Result<Tensor> {
        Ok(Tensor::from_slice(values, values.len(), &Device::Cpu)?)
    }

    fn view(buffer: &Tensor) -> TensorView<'_> {
        buffer.into()
    }

    fn matrix(matrix: &Weight) -> &Weight {
        matrix
    }

    fn is_quantised(matrix: &Weight) -> bool {
        matrix.is_quantised()
    }

    /// No op of the CPU rounds for another.
    fn takes_rounded(_: &Weight) -> bool {
        false
    }
}

impl Operand for View {
    type Indices = View;
    type Matrix = MatrixView;

    fn len(self) -> usize {
        View::len(self)
    }

    fn kind(self) -> Kind {
        View::kind(self)
    }

    fn slice(self, range: Range<usize>) -> Self {
        View::slice(self, range)
    }

    fn shares_memory(self, other: Self) -> bool {
        self.overlaps(other)
    }

    fn count(indices: View) -> Option<usize> {
        (indices.kind() == Kind::U32).then(|| indices.len())
    }

    fn shape(matrix: MatrixView) -> (usize, usize) {
        (matrix.rows, matrix.cols)
    }
}

/// Rows of a matrix on a device that are kept in one form.
#[derive(Clone, Copy, Debug)]
pub struct MatrixPart<V> {
    /// Dense values row by row, or the bytes of the format.
    pub values: V,
    pub rows: usize,
    /// `None`: the values are dense.
    pub format: Option<DeviceFormat>,
}

/// The most parts of a matrix: Q, K and V may each have a format of their own.
pub const MOST_PARTS: usize = 3;

/// The order of a matrix's columns on a device, where it is not that of the inputs.
#[derive(Clone, Copy, Debug)]
pub struct ColumnsView {
    /// `[cols]` u32: the input of each column.
    pub inputs: View,
    /// Memory for inputs in this order, bf16: of one row at least, and of as many as are multiplied
    /// at a time.
    pub gathered: View,
}

/// A matrix on a device, made of parts one below the other.
#[derive(Clone, Copy, Debug)]
pub struct MatrixView {
    parts: [Option<MatrixPart<View>>; MOST_PARTS],
    pub rows: usize,
    pub cols: usize,
    /// Memory to which rows may be dequantised for a product of many rows of activations.
    pub scratch: Option<View>,
    pub inputs: MatrixInputs,
}

/// What a product does with its inputs first.
#[derive(Clone, Copy, Debug)]
pub enum MatrixInputs {
    /// They are multiplied as they are.
    Plain,
    /// They are put into the order of the columns. All parts are packed.
    InOrder(ColumnsView),
    /// They are rounded to eight bits. All parts have codes of E4M3.
    Rounded(RoundedInputs<View>),
}

/// What products need that round activations to eight bits.
#[derive(Clone, Copy, Debug)]
pub struct RoundedInputs<V> {
    /// Memory for activations, bf16: for one row at least, and for as many as are multiplied at a
    /// time.
    pub memory: V,
    /// Whether each row of the matrix has the same scale in all columns.
    pub scaled_by_rows: bool,
}

impl MatrixView {
    pub fn dense(values: View, rows: usize, cols: usize) -> Self {
        let part = MatrixPart { values, rows, format: None };
        let parts = [Some(part), None, None];
        Self { parts, rows, cols, scratch: None, inputs: MatrixInputs::Plain }
    }

    /// The order of the columns, where it is not that of the inputs.
    pub(crate) fn order(&self) -> Option<ColumnsView> {
        match self.inputs {
            MatrixInputs::InOrder(order) => Some(order),
            _ => None,
        }
    }

    pub fn parts(&self) -> impl Iterator<Item = MatrixPart<View>> + use<> {
        self.parts.into_iter().flatten()
    }

    /// The only part.
    pub(crate) fn whole(&self) -> Option<MatrixPart<View>> {
        self.parts[0].filter(|part| part.rows == self.rows)
    }

    /// The values, if all of them are dense and in one part.
    pub(crate) fn dense_values(&self) -> Option<View> {
        self.whole().filter(|part| part.format.is_none()).map(|part| part.values)
    }
}

/// A matrix that owns its memory.
pub struct MatrixBuffer {
    /// At most [`MOST_PARTS`] of them.
    pub parts: Vec<MatrixPart<Buffer>>,
    pub cols: usize,
    pub scratch: Option<Arc<Buffer>>,
    pub order: Option<ColumnsBuffer>,
    /// Matrices of as many columns may share the memory.
    pub rounded: Option<RoundedInputs<Arc<Buffer>>>,
}

/// The order of columns and the memory for inputs, as [`ColumnsView`] says. Matrices may share the
/// latter.
pub struct ColumnsBuffer {
    pub inputs: Buffer,
    pub gathered: Arc<Buffer>,
}

/// The ops of a device.
pub type DeviceOps = Arc<dyn Gpu>;

impl OpMemory for DeviceOps {
    type Buffer = Buffer;
    type Matrix = MatrixBuffer;
    type View<'a> = View;

    fn allocate(&self, kind: Kind, len: usize) -> Result<Buffer> {
        Buffer::new(self, kind, len)
    }

    fn upload(&self, values: &[f32]) -> Result<Buffer> {
        Buffer::from_slice(self, values)
    }

    fn view(buffer: &Buffer) -> View {
        buffer.view()
    }

    fn matrix(matrix: &MatrixBuffer) -> MatrixView {
        let mut parts = [None; MOST_PARTS];
        for (to, &MatrixPart { ref values, rows, format }) in parts.iter_mut().zip(&matrix.parts) {
            *to = Some(MatrixPart { values: values.view(), rows, format });
        }
        let rows = matrix.parts.iter().map(|part| part.rows).sum();
        let scratch = matrix.scratch.as_ref().map(|scratch| scratch.view());
        let inputs = match (&matrix.order, &matrix.rounded) {
            (Some(ColumnsBuffer { inputs, gathered }), _) => MatrixInputs::InOrder(ColumnsView {
                inputs: inputs.view(),
                gathered: gathered.view(),
            }),
            (None, Some(RoundedInputs { memory, scaled_by_rows })) => {
                MatrixInputs::Rounded(RoundedInputs {
                    memory: memory.view(),
                    scaled_by_rows: *scaled_by_rows,
                })
            }
            (None, None) => MatrixInputs::Plain,
        };
        MatrixView { parts, rows, cols: matrix.cols, scratch, inputs }
    }

    fn is_quantised(matrix: &MatrixBuffer) -> bool {
        matrix.parts.iter().any(|part| part.format.is_some())
    }

    fn takes_rounded(matrix: &MatrixBuffer) -> bool {
        matrix.rounded.is_some()
    }
}

/// Refuses an output that shares memory with another argument: on the CPU their locks would wait
/// for each other, and everywhere their values would mix.
pub(crate) fn distinct<V: Operand>(op: &'static str, out: V, others: &[V]) -> Result<()> {
    let shared = others.iter().any(|other| out.shares_memory(*other));
    ensure(op, !shared, || "an output shares its memory with another argument".into())
}

/// Whether activations may be of this kind.
pub(crate) fn is_activation(kind: Kind) -> bool {
    matches!(kind, Kind::F32 | Kind::Bf16)
}
